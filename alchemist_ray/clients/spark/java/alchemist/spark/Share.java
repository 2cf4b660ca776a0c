package alchemist.spark;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/**
 * What the ranks of one node hold of a region, cut into the pieces in which it travels.
 *
 * <p>The same as {@code mpi_workers/matrix/node_shares.py}: both ends must cut alike. The session
 * computes the products of runs from the layout, so no layout is known here.
 */
final class Share {
    private static final int ROW_BYTES = 32 << 10; // as in node_shares.py

    /** {@code width} neighbours from {@code first} on, again after each {@code period}. */
    static final class Runs {
        final long first, width, period;

        Runs(long first, long width, long period) {
            this.first = first;
            this.width = width;
            this.period = period;
        }

        /** Those in a half-open interval: a part of a run, whole runs, a part of a run. */
        List<Span> spans(long start, long stop) {
            List<Span> found = new ArrayList<>(3);
            long head = first + Math.floorDiv(start - first, period) * period;
            if (head < start) {
                long cut = Math.min(head + width, stop);
                if (start < cut) {
                    found.add(new Span(start, 1, cut - start, period));
                }
                head += period;
            }
            long whole = Math.max(0, Math.floorDiv(stop - head - width, period) + 1);
            if (whole > 0) {
                found.add(new Span(head, whole, width, period));
            }
            long rest = head + whole * period;
            if (rest < stop) {
                found.add(new Span(rest, 1, stop - rest, period));
            }
            return found;
        }

        /** How many of them are less than {@code stop}. */
        long count(long stop) {
            long past = stop - first; // more than -period
            return past <= 0 ? 0 : past / period * width + Math.min(past % period, width);
        }

        /** The place of an index among them, or -1. */
        long position(long index) {
            long run = (index - first) / period, place = index - first - run * period;
            return index >= first && place < width ? run * width + place : -1;
        }

        boolean contains(long index) {
            return Math.floorMod(index - first, period) < width;
        }
    }

    /** {@code runs} runs of {@code width} indices, the first at {@code start}. */
    static final class Span {
        final long start, runs, width, period;

        Span(long start, long runs, long width, long period) {
            this.start = start;
            this.runs = runs;
            this.width = width;
            this.period = period;
        }

        long size() {
            return runs * width;
        }

        /** The same indices as one run, if no others are between its runs. */
        Span joined() {
            return width == period ? new Span(start, 1, size(), size()) : this;
        }

        /** The same indices, at most {@code most} at a time. */
        List<Span> cut(long most) {
            List<Span> found = new ArrayList<>();
            if (width > most) {
                for (long k = 0; k < runs; k++) {
                    for (long offset = 0; offset < width; offset += most) {
                        long length = Math.min(most, width - offset);
                        found.add(new Span(start + k * period + offset, 1, length, period));
                    }
                }
                return found;
            }
            long step = most / width;
            for (long k = 0; k < runs; k += step) {
                long count = Math.min(step, runs - k);
                found.add(new Span(start + k * period, count, width, period));
            }
            return found;
        }
    }

    /** Indices of a piece along the axis that travels slowly, and along the other. */
    private static final class Piece {
        final Span slow, fast;

        Piece(Span slow, Span fast) {
            this.slow = slow;
            this.fast = fast;
        }
    }

    private interface Copy {
        void run(int offset, int length) throws IOException;
    }

    private final List<Piece> pieces = new ArrayList<>();
    private final boolean byRow;
    private final long slow0, fast0;
    private final int itemsize;
    private long nbytes;

    /** A share of a region (row0, row1, col0, col1) that travels by rows or by columns. */
    Share(Target.Node node, long[] region, int itemsize, boolean byRow) {
        this.byRow = byRow;
        this.itemsize = itemsize;
        slow0 = byRow ? region[0] : region[2];
        fast0 = byRow ? region[2] : region[0];
        for (Runs[] product : node.products) {
            for (Span rows : product[0].spans(region[0], region[1])) {
                for (Span some : product[1].spans(region[2], region[3])) {
                    nbytes += rows.size() * some.size() * itemsize;
                    cut(byRow ? rows : some, byRow ? some : rows, node.chunk);
                }
            }
        }
    }

    /** Pieces of about {@code chunk} bytes; of rows, tiles: ranks store columns. */
    private void cut(Span slow, Span fast, long chunk) {
        long least = byRow ? ROW_BYTES / itemsize : 1;
        long across = Math.max(least, chunk / (slow.size() * itemsize));
        for (Span some : fast.cut(Math.max(1, across))) {
            for (Span others : slow.cut(Math.max(1, chunk / (some.size() * itemsize)))) {
                pieces.add(new Piece(others, some));
            }
        }
    }

    long nbytes() {
        return nbytes;
    }

    /** Send the share of a block of the region; its rows or columns have {@code stride} bytes. */
    void send(Connection connection, byte[] block, int first, long stride) throws IOException {
        walk(stride, (at, length) -> connection.write(block, first + at, length));
    }

    /** Fill a block of the region with the share; as {@link #send}. */
    void receive(Connection connection, byte[] block, int first, long stride) throws IOException {
        walk(stride, (at, length) -> connection.read(block, first + at, length));
    }

    /** Visit the contiguous runs of all pieces in their order. */
    private void walk(long stride, Copy copy) throws IOException {
        for (Piece piece : pieces) {
            Span slow = piece.slow.joined(), fast = piece.fast.joined();
            int length = (int) (fast.width * itemsize);
            for (long i = 0; i < slow.runs; i++) {
                for (long k = 0; k < slow.width; k++) {
                    long line = slow.start + i * slow.period + k - slow0;
                    long from = line * stride + (fast.start - fast0) * itemsize;
                    for (long j = 0; j < fast.runs; j++) {
                        copy.run((int) (from + j * fast.period * itemsize), length);
                    }
                }
            }
        }
    }
}
