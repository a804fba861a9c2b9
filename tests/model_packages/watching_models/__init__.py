"""An SGLang model package for tests: the capture classes, which also report what of SGLang has been replaced."""
