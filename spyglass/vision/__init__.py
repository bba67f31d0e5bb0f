"""Images to rows of the text model: packing, tower, aligner. Usable without the rest of the engine."""
