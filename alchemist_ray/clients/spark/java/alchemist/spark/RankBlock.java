package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.Arrays;
import java.util.stream.IntStream;
import org.apache.spark.unsafe.Platform;

/** One rank's block of a matrix in this process's memory. It is stored by columns. */
final class RankBlock implements Closeable {
    private static final int GROUP = 8; // columns that fill a cache line, of 8 bytes each

    final int rank;
    private final Share.Runs rows;
    private final int itemsize;
    private final long height; // rows of the block
    private final int[] places; // of the matrix's columns in the block, or -1
    private final int[] columns; // of the chosen ones here: their places in the block
    private final int[] columnFrom; // and their first bytes in a row
    private Segment segment; // null: closed
    private long written;

    /** Rows that are read or written have the {@code chosen} columns of the matrix. */
    RankBlock(Target target, Target.Held held, int[] chosen, String path, long nbytes)
            throws IOException {
        rank = held.rank;
        rows = held.rows;
        itemsize = target.element.nbytes;
        height = rows.count(target.rows);
        places = IntStream.range(0, target.cols)
                .map(col -> (int) held.cols.position(col)).toArray();
        int[] here = IntStream.range(0, chosen.length)
                .filter(k -> places[chosen[k]] >= 0).toArray();
        columns = Arrays.stream(here).map(k -> places[chosen[k]]).toArray();
        columnFrom = Arrays.stream(here).map(k -> k * itemsize).toArray();
        if (height * held.cols.count(target.cols) * itemsize > nbytes) {
            throw new IOException("rank " + rank + " has " + nbytes + " bytes for its block");
        }
        segment = Segment.open(path, nbytes);
    }

    long written() {
        return written;
    }

    /** Some rows of the matrix: those that this rank has are found once for all columns. */
    final class Part {
        private final long row, start, some; // the first, and how many are in the block from where
        private final int count, offset;
        private final Share.Span[] spans;

        private Part(long row, int count, int offset) {
            this.row = row;
            this.count = count;
            this.offset = offset;
            start = rows.count(row);
            some = rows.count(row + count) - start;
            spans = rows.spans(row, row + count).stream()
                    .map(Share.Span::joined).toArray(Share.Span[]::new);
        }

        private boolean has(long col) {
            return some > 0 && places[(int) col] >= 0;
        }

        private long address(long col) {
            return segment.address((places[(int) col] * height + start) * itemsize, some * itemsize);
        }

        /** The first element's byte in an array, in which the column begins at {@code first}. */
        private long at(int first, byte[] array) {
            if (first < 0 || first + (long) offset > array.length - (long) count * itemsize) {
                throw new IndexOutOfBoundsException(count + " elements at " + first);
            }
            return Block.BASE + first + offset;
        }

        /** Write the elements of this rank of a column, of which each element is given. */
        void put(long col, byte[] stored, int first) {
            if (!has(col)) {
                return;
            }
            long base = at(first, stored), to = address(col);
            for (Share.Span runs : spans) {
                long from = base + (runs.start - row) * itemsize;
                if (runs.width == 1) {
                    gather(stored, from, runs.period * itemsize, to, (int) runs.runs);
                } else {
                    for (long k = 0; k < runs.runs; k++) {
                        Platform.copyMemory(
                                stored, from + k * runs.period * itemsize,
                                null, to + k * runs.width * itemsize, runs.width * itemsize);
                    }
                }
                to += runs.size() * itemsize;
            }
            written += some;
        }

        /** Read the elements of this rank of a column, each to its place. */
        void get(long col, byte[] into, int first) {
            if (!has(col)) {
                return;
            }
            long base = at(first, into), from = address(col);
            for (Share.Span runs : spans) {
                long nbytes = runs.width * itemsize;
                for (long k = 0; k < runs.runs; k++, from += nbytes) {
                    long to = base + (runs.start + k * runs.period - row) * itemsize;
                    if (runs.width == 1) {
                        copy(null, from, into, to);
                    } else {
                        Platform.copyMemory(null, from, into, to, nbytes);
                    }
                }
            }
        }
    }

    /** A part of a column, which begins {@code start} rows after the first one in an array. */
    Part part(long row, int start, int count) {
        return new Part(row + start, count, start * itemsize);
    }

    private void gather(byte[] stored, long from, long step, long to, int count) {
        if (itemsize == 8) {
            for (int k = 0; k < count; k++, from += step, to += 8) {
                Platform.putLong(null, to, Platform.getLong(stored, from));
            }
            return;
        }
        for (int k = 0; k < count; k++, from += step, to += itemsize) {
            copy(stored, from, null, to);
        }
    }

    /** Copy an element. */
    private void copy(byte[] source, long from, byte[] into, long to) {
        switch (itemsize) {
            case 8:
                Platform.putLong(into, to, Platform.getLong(source, from));
                break;
            case 4:
                Platform.putInt(into, to, Platform.getInt(source, from));
                break;
            default:
                Platform.putByte(into, to, Platform.getByte(source, from));
        }
    }

    /** Write the elements of this rank of whole rows, in any order. */
    void putRows(byte[] stored, int rowBytes, long[] numbers, int count) {
        if (rowBytes * (long) count > stored.length) {
            throw new IndexOutOfBoundsException(count + " rows of " + rowBytes + " bytes");
        }
        int[] from = new int[count];
        long[] to = new long[count];
        int some = 0;
        for (int k = 0; k < count; k++) {
            long place = rows.position(numbers[k]);
            if (place >= 0) {
                from[some] = k * rowBytes;
                to[some++] = place * itemsize;
            }
        }
        for (int start = 0, stop; start < some; start = stop) { // rows that have one address
            long low = to[start], high = to[start];
            for (stop = start + 1; stop < some; stop++) {
                long least = Math.min(low, to[stop]), most = Math.max(high, to[stop]);
                if (most - least + itemsize > Segment.most()) {
                    break;
                }
                low = least;
                high = most;
            }
            for (int k = start; k < stop; k++) {
                to[k] -= low;
            }
            putRows(stored, from, to, start, stop, low, high + itemsize - low);
        }
        written += (long) some * columnFrom.length;
    }

    private void putRows(
            byte[] stored, int[] from, long[] to, int start, int stop, long low, long length) {
        int col = 0;
        if (itemsize == 8) {
            for (; col + 4 <= columnFrom.length; col += 4) { // of one cache line, if neighbours
                long a = column(col, low, length), b = column(col + 1, low, length);
                long c = column(col + 2, low, length), d = column(col + 3, low, length);
                long fromA = Block.BASE + columnFrom[col], fromB = Block.BASE + columnFrom[col + 1];
                long fromC = Block.BASE + columnFrom[col + 2];
                long fromD = Block.BASE + columnFrom[col + 3];
                for (int k = start; k < stop; k++) {
                    long row = from[k], place = to[k];
                    Platform.putLong(null, a + place, Platform.getLong(stored, fromA + row));
                    Platform.putLong(null, b + place, Platform.getLong(stored, fromB + row));
                    Platform.putLong(null, c + place, Platform.getLong(stored, fromC + row));
                    Platform.putLong(null, d + place, Platform.getLong(stored, fromD + row));
                }
            }
        }
        for (; col < columnFrom.length; col++) {
            long address = column(col, low, length), first = Block.BASE + columnFrom[col];
            for (int k = start; k < stop; k++) {
                copy(stored, first + from[k], null, address + to[k]);
            }
        }
    }

    /** The address of some rows of a chosen column. */
    private long column(int k, long low, long length) {
        return segment.address(columns[k] * height * itemsize + low, length);
    }

    /** Read the elements of this rank of whole rows; the first row begins at {@code first}. */
    void getRows(long row, int count, byte[] into, int first, int rowBytes) {
        long start = rows.count(row);
        int some = (int) (rows.count(row + count) - start), width = columnFrom.length;
        if (some == 0 || width == 0) {
            return;
        }
        long end = first + (count - 1L) * rowBytes + columnFrom[width - 1] + itemsize;
        if (first < 0 || rowBytes < 0 || end > into.length) {
            throw new IndexOutOfBoundsException(count + " rows of " + rowBytes + " bytes");
        }
        long[] to = new long[some];
        for (int k = 0, found = 0; k < count; k++) {
            if (rows.contains(row + k)) {
                to[found++] = Block.BASE + first + (long) k * rowBytes;
            }
        }
        int col = 0;
        for (; itemsize == 8 && col + GROUP <= width; col += GROUP) {
            getColumns(col, 8 * start, into, to);
        }
        for (; col < width; col++) {
            long from = column(col, start * itemsize, (long) some * itemsize);
            for (int k = 0; k < some; k++, from += itemsize) {
                copy(null, from, into, to[k] + columnFrom[col]);
            }
        }
    }

    private void getColumns(int col, long low, byte[] into, long[] to) {
        long length = 8L * to.length;
        long a = column(col, low, length), b = column(col + 1, low, length);
        long c = column(col + 2, low, length), d = column(col + 3, low, length);
        long e = column(col + 4, low, length), f = column(col + 5, low, length);
        long g = column(col + 6, low, length), h = column(col + 7, low, length);
        long toA = columnFrom[col], toB = columnFrom[col + 1], toC = columnFrom[col + 2];
        long toD = columnFrom[col + 3], toE = columnFrom[col + 4], toF = columnFrom[col + 5];
        long toG = columnFrom[col + 6], toH = columnFrom[col + 7];
        for (int k = 0; k < to.length; k++) {
            long row = to[k], from = 8L * k;
            Platform.putLong(into, row + toA, Platform.getLong(null, a + from));
            Platform.putLong(into, row + toB, Platform.getLong(null, b + from));
            Platform.putLong(into, row + toC, Platform.getLong(null, c + from));
            Platform.putLong(into, row + toD, Platform.getLong(null, d + from));
            Platform.putLong(into, row + toE, Platform.getLong(null, e + from));
            Platform.putLong(into, row + toF, Platform.getLong(null, f + from));
            Platform.putLong(into, row + toG, Platform.getLong(null, g + from));
            Platform.putLong(into, row + toH, Platform.getLong(null, h + from));
        }
    }

    @Override
    public void close() {
        if (segment != null) {
            segment.release();
            segment = null;
        }
    }
}
