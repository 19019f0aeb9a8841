"""Uploads by a process of their own (`SaveOptions.upload_process`): what the training computes in Python does not wait for them.

The rank stages into anonymous shared memory, which the other process maps; commands and answers travel over a socket. Terms:
task (one rank's file, to be written), uploader (what writes it: a thread of this process, or the other process).
"""
