"""Epochs of optimiser steps, for whatever is learned from given examples."""
