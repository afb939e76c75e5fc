"""TODO placement"""
