"""An SGLang model package for tests: the capture classes, which also report what of SGLang was replaced since its import."""
