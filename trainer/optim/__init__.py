"""Update rules over shards: AdamW with states of several widths, Muon, rules of users. Their states reshard with the weights."""
