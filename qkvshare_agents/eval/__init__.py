"""Measurements that the documentation rests on."""
