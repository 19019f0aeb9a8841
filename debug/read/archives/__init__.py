"""Archives of evidence: their members, where these stand while they are read, and a store that shows them."""
