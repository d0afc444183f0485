"""The simulator: the gateway's and the engine's own objects under a virtual clock. A tool; the serving path never imports it."""
