"""What the paper compares itself with: attention, patches and blocks of Swin, CSWin and CMT, for maps of any size."""
