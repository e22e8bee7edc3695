"""The training job behind ``moe-ncclep train``: a byte-level MoE GPT from Megatron-Core on real text.

* :mod:`~moe_ncclep.train.config`: what can be chosen, and the checks made before any rank starts.
* :mod:`~moe_ncclep.train.data`: text as bytes, held-out split, batches.
* :mod:`~moe_ncclep.train.model`, :mod:`~moe_ncclep.train.loop`: what every rank runs.
* :mod:`~moe_ncclep.train.ranks`, :mod:`~moe_ncclep.train.rank`: starting and supervising ranks, and a rank's entry.
* :mod:`~moe_ncclep.train.job`, :mod:`~moe_ncclep.train.report`: the whole job, its files and its summary.
"""
