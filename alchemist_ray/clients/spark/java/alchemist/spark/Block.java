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
    private final Target target;
    private final int rowBytes;
    private final long[] numbers; // of the rows
    private int count;
    private final List<Connection> connections = new ArrayList<>();
    private final List<List<RankBlock>> near = new ArrayList<>(); // of each node; null: another node
    private final boolean far; // whether any is
    private final long[] sent; // bytes and nanoseconds, of each node in turn

    Block(Target target) throws IOException {
        this.target = target;
        sent = new long[2 * target.nodes.size()];
        rowBytes = target.cols * target.element.nbytes;
        try {
            for (Target.Node node : target.nodes) {
                connections.add(Connection.open(node, target));
                Connection last = connections.get(connections.size() - 1);
                near.add(last.map(target, node, target.columns(), true));
            }
        } catch (IOException | RuntimeException error) {
            close();
            throw error;
        }
        far = near.contains(null);
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
        for (int k = 0; k < near.size(); k++) {
            if (near.get(k) != null) {
                long began = System.nanoTime();
                for (RankBlock rank : near.get(k)) {
                    rank.putRows(bytes, rowBytes, numbers, count);
                }
                sent[2 * k + 1] += System.nanoTime() - began;
            }
        }
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
                putRegion(first, last);
            }
        } else {
            putRows();
        }
    }

    private void putRegion(int first, int last) throws IOException {
        long[] region = {numbers[first], numbers[last - 1] + 1, 0, target.cols};
        stream(region, true, bytes, first * rowBytes);
    }

    /** Whether any element goes to another node. */
    boolean far() {
        return far;
    }

    /** Rows of columns on this node: tiles that are read once for all ranks. */
    RankBlock.Part[] parts(long row, int count) {
        List<RankBlock.Part> found = new ArrayList<>();
        for (List<RankBlock> ranks : near) {
            if (ranks != null) {
                int most = Math.max(NEAR_RUN * ranks.size(), TILE_BYTES / target.element.nbytes);
                for (int start = 0; start < count; start += most) {
                    for (RankBlock rank : ranks) {
                        found.add(rank.part(row, start, Math.min(most, count - start)));
                    }
                }
            }
        }
        return found.toArray(new RankBlock.Part[0]);
    }

    /** Elements were written to this node in so many nanoseconds. */
    void took(long nanos) {
        for (int k = 0; k < near.size(); k++) {
            sent[2 * k + 1] += near.get(k) != null ? nanos : 0;
        }
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
        took(System.nanoTime() - began);
        if (far) {
            stream(region, false, stored, 0);
        }
    }

    /** Send a region to other nodes, from rows or columns without gaps. */
    void stream(long[] region, boolean byRow, byte[] stored, int first) throws IOException {
        int itemsize = target.element.nbytes;
        long length = byRow ? region[3] - region[2] : region[1] - region[0];
        for (int k = 0; k < connections.size(); k++) {
            if (near.get(k) != null) {
                continue;
            }
            Target.Node node = target.nodes.get(k);
            Connection connection = connections.get(k);
            Share share = new Share(node, region, itemsize, byRow);
            if (share.nbytes() > 0) {
                long began = System.nanoTime();
                connection.beginPut(target.request(node, region, byRow), share.nbytes());
                share.send(connection, stored, first, length * itemsize);
                connection.flush();
                sent[2 * k] += share.nbytes();
                sent[2 * k + 1] += System.nanoTime() - began;
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
        for (int k = 0; k < connections.size(); k++) {
            if (near.get(k) == null) {
                long began = System.nanoTime();
                sent[2 * k] +=
                        putRows(target.nodes.get(k), connections.get(k), order, ascending.array());
                sent[2 * k + 1] += System.nanoTime() - began;
            }
        }
    }

    /** The bytes that were sent. */
    private long putRows(Target.Node node, Connection connection, Integer[] order, byte[] ascending)
            throws IOException {
        int itemsize = target.element.nbytes;
        List<int[]> columns = new ArrayList<>();
        long size = 0;
        for (Share.Runs[] product : node.products) {
            int[] cols = IntStream.range(0, target.cols)
                    .filter(product[1]::contains).toArray();
            columns.add(cols);
            for (Integer k : order) {
                size += product[0].contains(numbers[k]) ? cols.length : 0;
            }
        }
        if (size == 0) {
            return 0;
        }
        Map<String, Object> body = target.request(node);
        body.put("rows", ascending);
        connection.beginPut(body, size * itemsize);
        for (int p = 0; p < columns.size(); p++) {
            for (Integer k : order) {
                if (node.products.get(p)[0].contains(numbers[k])) {
                    for (int col : columns.get(p)) {
                        connection.write(bytes, k * rowBytes + col * itemsize, itemsize);
                    }
                }
            }
        }
        connection.flush();
        return size * itemsize;
    }

    static Failure duplicate(String what) {
        return new Failure(
                "IncompleteMatrixError",
                what + " appears twice: drop duplicates, or add them up");
    }

    /** Wait until the nodes have stored and counted everything; the times of each node. */
    List<Map<String, Object>> finish() throws IOException {
        flush();
        for (int k = 0; k < connections.size(); k++) {
            if (near.get(k) == null) {
                connections.get(k).beginSync();
                continue;
            }
            for (RankBlock rank : near.get(k)) {
                rank.close();
                sent[2 * k] += rank.written() * target.element.nbytes;
            }
            connections.get(k).beginUnmap(target, near.get(k));
        }
        List<Map<String, Object>> times = new ArrayList<>();
        for (int k = 0; k < connections.size(); k++) {
            Map<String, Object> answer = connections.get(k).endSync();
            Map<String, Object> its = new LinkedHashMap<>();
            its.put("node", target.nodes.get(k).number);
            its.put("route", near.get(k) == null ? "TCP" : "shared memory");
            its.put("nbytes", sent[2 * k]);
            its.put("send_s", sent[2 * k + 1] / 1e9);
            its.put("receive_s", answer.getOrDefault("receive_s", 0.0));
            its.put("deserialize_s", answer.getOrDefault("place_s", 0.0));
            times.add(its);
        }
        return times;
    }

    @Override
    public void close() throws IOException {
        for (List<RankBlock> ranks : near) {
            if (ranks != null) {
                ranks.forEach(RankBlock::close);
            }
        }
        for (Connection connection : connections) {
            connection.close();
        }
    }
}
