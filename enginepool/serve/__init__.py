"""`enginepool serve`: an HTTP server over a pool.

It uses upstream's request models and OpenAI classes, over the pool's stand-in for upstream's
TokenizerManager.

`server` owns sockets, signals and the drain. `app` includes the routes of every `*_api`. `exchange`
is one request that generates. `record` is what `log` and `metrics` read when it has ended. `app`
and what it imports import sgl_jax, so they are imported when the pool is open and has applied its
patches.
"""
