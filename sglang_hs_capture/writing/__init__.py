"""The writing process: rows from the shared ring, on their way into the store. It needs neither torch nor SGLang."""
