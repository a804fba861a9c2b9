"""An SGLang model package for tests: the capture classes, which also record the same states in another way.

The recording is by plain forward hooks on the norms: a layer's input norm adds the pending update to the residual
stream and returns the sum, which is the boundary's state. Written to ``HS_RECORD_DIR``, a file a forward.
"""
