"""TODO top"""
