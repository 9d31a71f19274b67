"""The serving loop behind ``mmgraph run``: photos to tokens through the embedder and captured graphs.

Nothing heavy is imported here: transformers, Pillow and the photo packages are loaded by the functions that
need them.
"""
