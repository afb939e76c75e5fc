"""TODO thinking"""
