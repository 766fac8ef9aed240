"""From settings to objects: what is decided at the start, the memory plan, and how engines and drafters are built."""
