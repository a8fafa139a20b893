"""The ranks' side of replacing a rank that died in a training. The parent's side is nbkit/bridge/parent."""
