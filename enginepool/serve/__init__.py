"""`enginepool serve`: HTTP in front of a pool, with upstream's own request models and OpenAI
classes over the pool's stand-in for their TokenizerManager.

`server` owns sockets, signals and the drain; `app` puts the routes of the three `*_api` together;
`exchange` is one request that generates, `record` what is left of it for `log` and `metrics`.
Modules that import sgl_jax (`app` and what it imports) are imported when a pool is open: the
patches come first.
"""
