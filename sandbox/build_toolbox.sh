# Builds a toolbox inside the base image (see docker_toolbox.py). Run as: sh -e build_toolbox.sh ROOT PACKAGE...
# Knows Debian's Python and glibc. All output of use goes to stderr's last lines, which become the error message.

root=$1
shift
python=$root/python

version=$(/usr/bin/python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
mkdir -p "$python/bin" "$python/lib"
cp -L "/usr/bin/$version" "$python/bin/$version"
cp -rL "/usr/lib/$version" "$python/lib/$version"

# Every shared library of the program and of its extension modules, the C library and its loader included: an image
# may have an older one, or another kind.
libraries() {
    for file in "$@"; do ldd "$file"; done | awk '$3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | sort -u
}
libraries "$python/bin/$version" "$python/lib/$version"/lib-dynload/*.so | while read -r library; do
    cp -L "$library" "$python/lib/"
done
# Name lookups load the first three at run time where they are not built into the C library; compiled packages count on
# the others being there.
for library in libnss_dns.so.2 libnss_files.so.2 libresolv.so.2 \
    libgcc_s.so.1 libstdc++.so.6 librt.so.1 libdl.so.2 libpthread.so.0 libutil.so.1; do
    found=$(ldconfig -p | awk -v name="$library" '$1 == name { print $NF; exit }')
    if [ -n "$found" ]; then cp -L "$found" "$python/lib/"; fi
done
# RPATH, not RUNPATH: it also serves libraries that extension modules load, and it is no environment variable.
loader=$(basename "$(patchelf --print-interpreter "$python/bin/$version")")
patchelf --set-interpreter "$python/lib/$loader" --force-rpath --set-rpath '$ORIGIN/../lib' "$python/bin/$version"

"$python/bin/$version" -m venv --without-pip "$root"
cp /quick_start.pth "$root/lib/$version/site-packages/"
if [ $# -gt 0 ]; then
    "$root/bin/python" -I "$(ls /usr/share/python-wheels/pip-*.whl)/pip" install --no-compile --no-cache-dir --quiet "$@" 1>&2
fi
"$root/bin/python" -I -m compileall -q -j 0 --invalidation-mode unchecked-hash "$python/lib/$version" "$root/lib" ||
    true # some packages carry files for other Python versions
"$root/bin/python" -I -c 'import ssl, sqlite3, ctypes, lzma, bz2, zlib'
