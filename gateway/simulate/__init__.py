"""The simulator: the gateway's and the engine's own objects under a virtual clock. The serving path never imports it."""
