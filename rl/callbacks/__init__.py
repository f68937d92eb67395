"""Callbacks for SB3's `learn`: a contrastive objective, evaluations, checkpoints."""
