#!/usr/bin/env bash
# Unpacks the SLURM, or the Python, of another Debian release beside the installed one, with the libraries that it needs.
#
#   bash slurm/sandbox/unpack.sh trixie /opt/slurm-trixie        # SLURM 24.11; use forky for the newest
#   PATH=/opt/slurm-trixie/bin:$PATH python slurm/sandbox up
#   bash slurm/sandbox/unpack.sh forky /opt/python-forky python  # /opt/python-forky/root/usr/bin/python3.14
#
# The packages come from the mirror that apt is configured with, checked by its keyring. If apt has no source of Debian,
# as on Ubuntu, set DEBIAN_MIRROR to a mirror's URL, and install debian-archive-keyring. Nothing outside of that folder
# changes. Its programs have the other release's loader and libraries written into them, so the folder can't be moved.
# munge and MariaDB remain those of this machine.
set -euo pipefail
release=${1:?usage: unpack.sh RELEASE FOLDER [python]}
folder=${2:?usage: unpack.sh RELEASE FOLDER [python]}
case ${3:-slurm} in
    slurm) wanted="slurmctld slurmd slurm-client slurmdbd" ;;
    python) wanted="python3 python3-venv" ;;
    *) echo "usage: unpack.sh RELEASE FOLDER [python]" >&2 && exit 2 ;;
esac
# label, component, address and file of each source; apt knows the label once it has the source's list
sources() { apt-get indextargets --format '$(LABEL) $(COMPONENT) $(REPO_URI) $(SOURCESENTRY)' "Created-By: Packages"; }
debian() { sources | awk '$1 == "Debian" && $2 == "main" && !n++ { print $3, $4 }'; }
source=$(debian)
if [ -z "$source" ] && [ -z "${DEBIAN_MIRROR:-}" ]; then
    apt-get update -qq
    source=$(debian)
fi
[ -z "${DEBIAN_MIRROR:-}" ] || source=$DEBIAN_MIRROR
read -r mirror entry <<<"$source" || true
if [ -z "$mirror" ]; then
    echo "unpack.sh: expected a mirror of Debian among apt's sources, found none; set DEBIAN_MIRROR to its URL" >&2
    exit 1
fi
# a source names its keyring, or else apt trusts those of /etc/apt
keys=$([ -z "${entry:-}" ] || sed -nE 's/^Signed-By: *([^ ]+).*/\1/p; s/^deb .*signed-by=([^] ]+).*/\1/p' "${entry%:*}" | head -n 1)
usual=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$keys" ] || [ ! -r $usual ] || keys=$usual
if [ -z "$keys" ] && [ -z "${entry:-}" ]; then
    echo "unpack.sh: expected $usual, found nothing: apt-get install debian-archive-keyring" >&2
    exit 1
fi

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
command -v patchelf >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends patchelf >/dev/null

# apt with this release alone, and as if nothing were installed: then it also names the libraries
apt=$folder/apt
rm -rf "$folder"/{debs,root,bin,apt,plugins,complete}
mkdir -p "$apt"/{cache/archives/partial,state/lists/partial} "$folder"/{debs,root,bin}
: >"$apt/status"
echo "deb ${keys:+[signed-by=$keys] }$mirror $release main" >"$apt/sources.list"
cat >"$apt/apt.conf" <<END
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "-";
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
APT::Sandbox::User "root";
END
export APT_CONFIG=$apt/apt.conf
apt-get update -qq
packages=$(apt-get install --simulate --no-install-recommends $wanted | awk '/^Inst/ { print $2 }')
(cd "$folder/debs" && apt-get download -qq $packages)
for package in "$folder"/debs/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done

library=$(dirname "$(find "$folder/root/usr/lib" -name 'libc.so.6' | head -n 1)")
loader=$(find "$folder/root/usr" -name 'ld-linux-*.so.*' | head -n 1)
if [ "${3:-}" = python ]; then
    python=$(find "$folder/root/usr/bin" -name 'python3.*' -type f)
    # in place: it finds its standard library relative to its own path
    patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$library" "$python"
    # where venv takes pip from
    grep -rlZ /usr/share/python-wheels "$folder"/root/usr/lib/python3.* \
        | xargs -0 sed -i "s#/usr/share/python-wheels#${folder//&/\\&}/root&#"
    "$python" --version
    touch "$folder/complete"
    exit
fi
ln -sfn "$library/slurm-wlm" "$folder/plugins"
for name in slurmctld slurmd slurmstepd slurmdbd srun sbatch salloc scancel scontrol sinfo squeue sacct sacctmgr sattach sstat; do
    for found in "$folder"/root/usr/{sbin,bin}/$name{-wlm,}; do
        [ -f "$found" ] || continue
        cp --dereference "$found" "$folder/bin/$name"
        # --force-rpath: it also holds for the libraries of the libraries
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$library/slurm-wlm:$library" "$folder/bin/$name"
        break
    done
done
SLURM_CONF=/dev/null "$folder/bin/scontrol" --version 2>/dev/null || "$folder/bin/slurmctld" -V
touch "$folder/complete"
