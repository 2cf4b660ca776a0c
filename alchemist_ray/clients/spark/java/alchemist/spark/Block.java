package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import org.apache.spark.unsafe.Platform;

/**
 * Rows that wait to be sent, and the connections to the nodes of their matrix.
 *
 * <p>On the ranks' own node elements are written into the ranks' memory, and to others streamed.
 */
final class Block implements Closeable {
    static final long BASE = Platform.BYTE_ARRAY_OFFSET;
    private static final int BLOCK_BYTES = 8 << 20;
    private static final int NEAR_BYTES = 512 << 10; // without streams: it stays in the cache
    private static final int NEAR_ROWS = 128; // at least: neighbours in the ranks' memory
    private static final int TILE_BYTES = 16 << 10; // of a column: read once for all ranks
    private static final int NEAR_RUN = 128; // elements, at least, of each rank in such a tile
    private static final int MIN_RUN = 16; // rows: longer runs are sent as regions

    final byte[] bytes;
    final Target target;
    private final int rowBytes;
    private final long[] numbers; // of the rows
    private int count;
    private final List<Connection> connections;
    private final boolean far; // whether any is to another node

    Block(Target target) throws IOException {
        this.target = target;
        rowBytes = target.cols * target.element.nbytes;
        connections = Connection.all(target, target.columns(), true);
        far = connections.stream().anyMatch(node -> !node.near);
        int rows = (far ? BLOCK_BYTES : NEAR_BYTES) / Math.max(1, rowBytes);
        int most = BLOCK_BYTES / Math.max(1, rowBytes);
        numbers = new long[Math.max(1, far ? most : Math.min(most, Math.max(NEAR_ROWS, rows)))];
        bytes = new byte[numbers.length * rowBytes];
    }

    /** How many rows fit. */
    int capacity() {
        return numbers.length;
    }

    /** Where the next row goes; {@link #add} follows. */
    int offset() {
        return count * rowBytes;
    }

    /** The row at {@link #offset} is complete. */
    void add(long number) throws IOException {
        numbers[count++] = number;
        if (count == numbers.length) {
            flush();
        }
    }

    /** Send the rows that wait. */
    void flush() throws IOException {
        long began = System.nanoTime();
        for (Connection node : connections) {
            node.blocks.forEach(rank -> rank.putRows(bytes, rowBytes, numbers, count));
        }
        took(began);
        if (far) {
            stream();
        }
        count = 0;
    }

    private void stream() throws IOException {
        int breaks = 0;
        for (int k = 1; k < count; k++) {
            breaks += numbers[k] != numbers[k - 1] + 1 ? 1 : 0;
        }
        if ((long) breaks * MIN_RUN < count) {
            for (int first = 0, last; first < count; first = last) {
                last = first + 1;
                while (last < count && numbers[last] == numbers[last - 1] + 1) {
                    last++;
                }
                long[] region = {numbers[first], numbers[last - 1] + 1, 0, target.cols};
                stream(region, true, bytes, first * rowBytes);
            }
        } else {
            putRows();
        }
    }

    /** Whether any element goes to another node. */
    boolean far() {
        return far;
    }

    /** Rows of columns on this node: tiles that are read once for all ranks. */
    RankBlock.Part[] parts(long row, int count) {
        List<RankBlock.Part> found = new ArrayList<>();
        for (Connection node : connections) {
            int least = NEAR_RUN * node.blocks.size();
            int most = Math.max(least, TILE_BYTES / target.element.nbytes);
            for (int start = 0; start < count; start += most) {
                for (RankBlock rank : node.blocks) {
                    found.add(rank.part(row, start, Math.min(most, count - start)));
                }
            }
        }
        return found.toArray(new RankBlock.Part[0]);
    }

    /** Elements were written to this node since a time. */
    void took(long began) {
        long nanos = System.nanoTime() - began;
        connections.stream().filter(node -> node.near).forEach(node -> node.sentNanos += nanos);
    }

    /** Send a region that is stored by columns, without gaps. */
    void put(long[] region, byte[] stored) throws IOException {
        long began = System.nanoTime();
        int count = Math.toIntExact(region[1] - region[0]);
        RankBlock.Part[] parts = parts(region[0], count);
        for (long col = region[2]; col < region[3]; col++) {
            int first = (int) (col - region[2]) * count * target.element.nbytes;
            for (RankBlock.Part part : parts) {
                part.put(col, stored, first);
            }
        }
        took(began);
        if (far) {
            stream(region, false, stored, 0);
        }
    }

    /** Send a region to other nodes, from rows or columns without gaps. */
    void stream(long[] region, boolean byRow, byte[] stored, int first) throws IOException {
        int itemsize = target.element.nbytes;
        long length = byRow ? region[3] - region[2] : region[1] - region[0];
        for (Connection to : connections) {
            if (to.near) {
                continue;
            }
            Share share = new Share(to.node, region, itemsize, byRow);
            if (share.nbytes() > 0) {
                to.beginPut(target.request(to.node, region, byRow), share.nbytes());
                share.send(to, stored, first, length * itemsize);
                to.endPut();
            }
        }
    }

    /** Rows in any order travel in ascending order, with their numbers. */
    private void putRows() throws IOException {
        Integer[] order = new Integer[count];
        Arrays.setAll(order, k -> k);
        Arrays.sort(order, (a, b) -> Long.compare(numbers[a], numbers[b]));
        ByteBuffer ascending = ByteBuffer.allocate(8 * count).order(ByteOrder.LITTLE_ENDIAN);
        for (int k = 0; k < count; k++) {
            if (k > 0 && numbers[order[k]] == numbers[order[k - 1]]) {
                throw duplicate("row " + numbers[order[k]]);
            }
            ascending.putLong(numbers[order[k]]);
        }
        for (Connection to : connections) {
            if (!to.near) {
                putRows(to, order, ascending.array());
            }
        }
    }

    private void putRows(Connection to, Integer[] order, byte[] ascending) throws IOException {
        int itemsize = target.element.nbytes;
        List<int[]> columns = new ArrayList<>();
        long size = 0;
        for (Share.Runs[] product : to.node.products) {
            int[] cols = IntStream.range(0, target.cols)
                    .filter(product[1]::contains).toArray();
            columns.add(cols);
            for (Integer k : order) {
                size += product[0].contains(numbers[k]) ? cols.length : 0;
            }
        }
        if (size == 0) {
            return;
        }
        Map<String, Object> body = target.request(to.node);
        body.put("rows", ascending);
        to.beginPut(body, size * itemsize);
        for (int p = 0; p < columns.size(); p++) {
            for (Integer k : order) {
                if (to.node.products.get(p)[0].contains(numbers[k])) {
                    for (int col : columns.get(p)) {
                        to.write(bytes, k * rowBytes + col * itemsize, itemsize);
                    }
                }
            }
        }
        to.endPut();
    }

    static Failure duplicate(String what) {
        return new Failure(
                "IncompleteMatrixError",
                what + " appears twice: drop duplicates, or add them up");
    }

    /** Wait until the nodes have stored and counted everything; the times of each node. */
    List<Map<String, Object>> finish() throws IOException {
        flush();
        for (Connection node : connections) {
            if (node.near) {
                node.beginUnmap(target);
            } else {
                node.beginSync();
            }
        }
        List<Map<String, Object>> times = new ArrayList<>();
        for (Connection node : connections) {
            Map<String, Object> answer = node.endSync();
            Map<String, Object> its = new LinkedHashMap<>();
            its.put("node", node.node.number);
            its.put("route", node.near ? "shared memory" : "TCP");
            its.put("nbytes", node.sentBytes);
            its.put("send_s", node.sentNanos / 1e9);
            its.put("receive_s", answer.getOrDefault("receive_s", 0.0));
            its.put("deserialize_s", answer.getOrDefault("place_s", 0.0));
            times.add(its);
        }
        return times;
    }

    @Override
    public void close() throws IOException {
        Connection.closeAll(connections);
    }
}
