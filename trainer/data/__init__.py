"""From text to batches: corpora, tokenizers, token files, sample order, batches. Imports `config`.

Terms: source (one corpus of a mixture), sample (`seq_len` tokens), position (samples consumed so far), held out (for validation).
"""
