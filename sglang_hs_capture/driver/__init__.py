"""The driver: starts or finds a server, sends it prompts, and waits until their states are safely on disk."""
