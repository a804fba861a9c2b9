"""SGLang external model package: ``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_hs_capture.models``.

Each module's ``EntryClass`` holds subclasses of SGLang's own model classes. Those that keep the upstream name take its
place in the registry, so a checkpoint needs no edit; the others are for a config.json that names them.
"""
