"""The NCCL profiler plugin (C), and what a reader of its probes must know (`usdt`)."""
