package alchemist.spark;

import io.netty.util.internal.PlatformDependent;
import java.io.IOException;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.storage.StorageUtils;
import org.apache.spark.unsafe.Platform;

/**
 * Memory of a rank, mapped into this process for all its tasks.
 *
 * <p>The mapping is kept for the next transfer, because page faults take longer than to copy the
 * elements. Unused, it is dropped after {@link #IDLE_MS}: it holds the memory of ranks that are gone.
 */
final class Segment {
    private static final long IDLE_MS = 10_000; // as IDLE_S of node_connections.py
    private static final long WINDOW = 1L << 30; // Java maps at most 2 GiB at once
    private static final int WORD = 8;
    private static final long NEAR_FAULT = 64 << 10; // bytes that Linux maps when one is read
    private static final Map<Object, Segment> KEPT = new HashMap<>(); // by file and size
    private static Thread cleaner;

    private final List<MappedByteBuffer> mapped = new ArrayList<>();
    private final long nbytes;
    private final long[] windows; // addresses; each window reaches to the end of the next
    private final boolean[] read; // whether each {@link #NEAR_FAULT} bytes were, and so are mapped
    private int users;
    private long released; // the time
    private volatile byte touched;

    /** Map a file, or use the mapping of another transfer; {@link #release} follows. */
    static Segment open(String name, long nbytes) throws IOException {
        Path path = Paths.get(name);
        Object file = Files.readAttributes(path, BasicFileAttributes.class).fileKey();
        Object key = Arrays.asList(file, nbytes);
        synchronized (KEPT) {
            Segment found = KEPT.get(key); // the file exists as long as its mapping
            if (found == null) {
                found = new Segment(path, nbytes);
                KEPT.put(key, found);
            }
            found.users++;
            return found;
        }
    }

    private Segment(Path path, long nbytes) throws IOException {
        this.nbytes = nbytes;
        windows = new long[(int) ((nbytes + WINDOW - 1) / WINDOW)];
        read = new boolean[(int) ((nbytes + NEAR_FAULT - 1) / NEAR_FAULT)];
        try (FileChannel file = FileChannel.open(
                path, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            if (file.size() < nbytes) { // to map more would make the file larger
                throw new IOException(path + " has " + file.size() + " of " + nbytes + " bytes");
            }
            for (int k = 0; k < windows.length; k++) {
                long length = Math.min(2 * WINDOW - WORD, nbytes - k * WINDOW);
                mapped.add(file.map(FileChannel.MapMode.READ_WRITE, k * WINDOW, length));
                windows[k] = PlatformDependent.directBufferAddress(mapped.get(k));
            }
        } catch (IOException | RuntimeException error) {
            mapped.forEach(StorageUtils::dispose);
            throw error;
        }
    }

    void release() {
        synchronized (KEPT) {
            users--;
            released = System.currentTimeMillis();
            if (cleaner == null) {
                cleaner = new Thread(Segment::clean, "alchemist-segments");
                cleaner.setDaemon(true);
                cleaner.start();
            }
        }
    }

    /** Drop mappings that are idle, until there are none. */
    private static void clean() {
        synchronized (KEPT) {
            try {
                while (!KEPT.isEmpty()) {
                    KEPT.wait(IDLE_MS / 4);
                    KEPT.values().removeIf(Segment::dropped);
                }
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
            cleaner = null;
        }
    }

    /** Drop the mapping if it is idle; whether it was. */
    private boolean dropped() {
        boolean idle = users == 0 && System.currentTimeMillis() - released >= IDLE_MS;
        if (idle) {
            mapped.forEach(StorageUtils::dispose);
        }
        return idle;
    }

    /** The most bytes that have one address. */
    static long most() {
        return WINDOW - WORD;
    }

    /** The address of some bytes. The JVM does not check accesses to it. */
    long address(long at, long length) {
        if (at < 0 || length < 0 || at > nbytes - length || length > most()) {
            throw new IndexOutOfBoundsException(length + " bytes at " + at + " of " + nbytes);
        }
        long address = windows[(int) (at / WINDOW)] + at % WINDOW;
        for (long k = at / NEAR_FAULT; k * NEAR_FAULT < at + length; k++) {
            if (!read[(int) k]) { // a fault of a write would map one page only
                touched = Platform.getByte(null, address + Math.max(0, k * NEAR_FAULT - at));
                read[(int) k] = true;
            }
        }
        return address;
    }
}
