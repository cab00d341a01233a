"""`make tpu-check`: what TPUs would refuse of a pool's programs, found without one."""
