"""Casts of the recurrent networks, which `torch.nn.LSTM` and its siblings reach through `torch._VF`.

The weights come as a list. `torch.lstm` is the same function as `torch._VF.lstm`, in a second place.
"""

from ampatch.table import LOWER, CastTable, Row

_ROWS = (
    Row("lstm", LOWER, "cuDNN runs every gate's GEMM on tensor cores, over all time steps"),
    Row("gru", LOWER, "cuDNN runs every gate's GEMM on tensor cores, over all time steps"),
    Row("rnn_tanh", LOWER, "one GEMM a time step; tanh keeps the state between -1 and 1"),
    Row("rnn_relu", LOWER, "one GEMM a time step"),
    Row("lstm_cell", LOWER, "two GEMMs and one fused kernel for the gates"),
    Row("gru_cell", LOWER, "two GEMMs and one fused kernel for the gates"),
    Row("rnn_tanh_cell", LOWER, "two GEMMs; tanh keeps the state between -1 and 1"),
    Row("rnn_relu_cell", LOWER, "two GEMMs"),
)

VF = CastTable("torch._VF", _ROWS)
TORCH_RECURRENT = CastTable("torch", _ROWS)
