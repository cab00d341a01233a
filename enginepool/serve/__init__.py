"""`enginepool serve`: an HTTP server over a pool.

It uses upstream's request models and OpenAI classes, over the pool's stand-in for upstream's
TokenizerManager.

`server` owns sockets, signals and the drain. `app` includes the routes of every `*_api`. `exchange`
is one request that generates. `record` describes an exchange that has ended, for `log`, `metrics`
and `history`. `app` and what it imports import sgl_jax, so they are imported when the pool is open
and has applied its patches.
"""
