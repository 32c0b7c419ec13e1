"""What the lowering by Inductor stands on: the step in pieces, each compiled once, and what runs between them."""
