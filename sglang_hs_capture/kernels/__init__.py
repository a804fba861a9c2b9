"""The pack kernel and its reference."""
