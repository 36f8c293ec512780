"""T1 kit: the two memory walls of training language models on one GPU.

`t1lib.heads` computes the output layer's loss, `t1lib.train` trains with the weights resident or streamed, `t1lib.plan`
predicts memory and time, `t1lib.text` trains on text; `t1lib.measure` and `t1lib.kit` serve the notebooks.
"""

__version__ = "0.1.0"
