"""The decoder, its attention, rotary embeddings, loss and LoRA adapters. No parallelism: imports only `device_mesh`.

Terms: part (a decoder with the layers of one pipeline stage), region (a module between entering and leaving tensor parallelism).
"""
