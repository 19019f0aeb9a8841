"""How tensors are sharded over a mesh of ranks: pure arithmetic without torch and I/O. Imports only errors.

Terms: mesh (named axes of ranks), axis, degree (an axis's size), rank (global number), coordinate (position of a rank),
placement (the axes that cut a tensor, in order, each with the dimension it cuts), box (offsets and sizes), shard (the box of a
tensor that a rank holds), replica (an equal copy on another rank), stage (consecutive layers on one coordinate of `pp`).
"""
