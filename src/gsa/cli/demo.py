def demo(): 
    """x"""
