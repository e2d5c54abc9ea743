"""Plugins for Accelerate, Lightning, transformers and timm, a module each, made of public names alone."""
