# program: GCC's sanitizer: leak
# does: finds one error of each of its kinds
# needs: gcc
# version: gcc --version | head -n 1
# seconds: 60
# with: gcc-sanitizer.sh
sanitizer=leak
