"""TODO bench"""
