"""The data model of the debugger: what was read of a job, and what was concluded. Imports no other room of debug.

Terms: run (one incident of one job), operation (a collective, send or recv as issued), black box (the recorder's mapped file),
block (the operations of several ranks as one table), flag (a defect of the evidence), situation (what a rank was doing), verdict.
"""
