"""Fault injection: a faulty store, a faulty S3 proxy, and the campaigns that use them. A fault is one injected failure."""
