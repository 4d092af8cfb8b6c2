"""Run many configs, each in a folder of its own: in processes of this machine (local.py) or on a Ray cluster (on_ray.py)."""
