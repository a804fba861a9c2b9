"""The platform on which SGLang's engine runs without an accelerator."""
