"""How a step reaches the model: laid out in a frame (`frame.py`), run as a captured graph or op by op (`steps.py`)."""
