"""Effects: what carries out the decisions of `rollsync.pure`, on Ray, torch, vLLM and the disk."""
