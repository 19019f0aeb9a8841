"""`StorageWriter` and `StorageReader` for torch.distributed.checkpoint. Imports `saving`, `loading` and the rooms below them."""
