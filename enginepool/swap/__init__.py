"""New weights on every engine or on none, memory given back, and looks at weights."""
