#!/bin/busybox sh
# The first process of a guest, from its initrd: drivers, network, root file system, and over to
# start.sh there. The root is read-only and shared; what is written lies over it, in memory.
/bin/busybox mkdir -p /proc /sys /dev /disk /over /new
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
exec > /dev/console 2>&1
PATH=/bin
/bin/busybox --install -s /bin

fail() {
    echo "alchemist-guest: failed: $*"
    sleep 5
    poweroff -f
}

for again in 1 2 3; do  # they need each other; the kernel knows which are there
    for module in /modules/*.ko; do insmod "$module" 2> /dev/null; done
done

settings=/sys/firmware/qemu_fw_cfg/by_name/opt/org.alchemist/guest/raw
[ -r $settings ] || fail "no settings in the firmware's configuration"
. $settings

hostname "$NAME"
echo "alchemist-guest: $NAME has booted"
ip link set lo up
ip link set eth0 mtu "$MTU" || fail "no network with an MTU of $MTU"
ip addr add "$ADDRESS" dev eth0
ip link set eth0 up
echo "${ARP:-}" | while read -r address hardware; do
    [ -z "$address" ] || arp -i eth0 -s "$address" "$hardware" || fail "no static ARP of $address"
done
# Ray finds its own address by the way to somewhere; nothing is sent there.
ip route add default dev eth0

mount -t ext4 -o ro /dev/vda /disk || fail "no root file system"
mount -t tmpfs -o mode=755 tmpfs /over
mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/disk,upperdir=/over/upper,workdir=/over/work overlay /new \
    || fail "no overlay"
mkdir -p /new/proc /new/sys /new/dev /new/run /new/tmp /new/etc
mount --move /proc /new/proc
mount --move /sys /new/sys
mount --move /dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
ln -s /proc/self/fd /new/dev/fd  # for <(...) of bash, which Spark's scripts use
mount -t devpts devpts /new/dev/pts
mount -t tmpfs -o mode=1777,size=60% tmpfs /new/dev/shm
mount -t tmpfs -o mode=1777 tmpfs /new/tmp
mount -t tmpfs -o mode=755 tmpfs /new/run
if [ -n "${VOLUME:-}" ]; then
    mkdir -p /new/volume
    # Guests are ended, not shut down: a write is on the disk when it returns.
    mount -t ext4 -o sync "/new$VOLUME" /new/volume || fail "no volume in $VOLUME"
fi
mkdir -m 700 /new/run/alchemist
cp /start.sh /bin/busybox /new/run/alchemist/
cat "/new$settings" > /new/run/alchemist/settings
chmod 600 /new/run/alchemist/settings
printf '127.0.0.1 localhost\n%s\n' "$HOSTS" > /new/etc/hosts
echo "$NAME" > /new/etc/hostname
: > /new/etc/resolv.conf
exec switch_root /new /bin/sh /run/alchemist/start.sh
