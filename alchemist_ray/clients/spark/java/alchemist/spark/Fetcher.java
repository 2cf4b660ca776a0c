package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/**
 * Reads rows, of all columns or of some, and regions of a matrix; connects at the first one.
 *
 * <p>On the ranks' own node it reads the ranks' memory; other nodes stream their share.
 */
final class Fetcher implements Closeable {
    static final int BATCH_BYTES = 1 << 20; // of elements, fetched at once
    private static final int GAP_SHARE = 4; // a request costs about as much as a quarter of a batch

    final Target target;
    private final int[] chosen; // columns of the rows, ascending
    private final List<int[]> runs = new ArrayList<>(); // chosen[from, to): read by one request
    private List<Connection> connections; // null: not yet
    private boolean far; // whether any is to another node

    Fetcher(Target target) {
        this(target, target.columns());
    }

    Fetcher(Target target, int[] chosen) {
        this.target = target;
        this.chosen = chosen;
        for (int from = 0, to; from < chosen.length; from = to) {
            for (to = from + 1; to < chosen.length; to++) {
                if (chosen[to] - chosen[to - 1] - 1 > chosen.length / GAP_SHARE) {
                    break;
                }
            }
            runs.add(new int[] {from, to});
        }
    }

    /** Rows [start, start + count): each begins {@code stride} bytes after the one before. */
    void rows(long start, int count, byte[] into, int first, int stride) throws IOException {
        if (chosen.length == 0) {
            return;
        }
        connect();
        if (far) {
            for (int[] run : runs) {
                receive(start, count, run, into, first + run[0] * target.element.nbytes, stride);
            }
        }
        for (Connection node : connections) {
            node.blocks.forEach(rank -> rank.getRows(start, count, into, first, stride));
        }
    }

    /** The share of other nodes of a run of columns; elements of this node are undefined. */
    private void receive(long start, int count, int[] run, byte[] into, int first, int stride)
            throws IOException {
        int nbytes = target.element.nbytes, left = chosen[run[0]], right = chosen[run[1] - 1] + 1;
        long[] region = {start, start + count, left, right};
        if (right - left == run[1] - run[0]) {
            receive(region, true, into, first, stride);
            return;
        }
        int rowBytes = Math.multiplyExact(right - left, nbytes);
        byte[] gapped = new byte[Math.multiplyExact(count, rowBytes)];
        receive(region, true, gapped, 0, rowBytes);
        for (int row = 0; row < count; row++) {
            for (int k = run[0], to = first + row * stride; k < run[1]; k++, to += nbytes) {
                int from = row * rowBytes + (chosen[k] - left) * nbytes;
                System.arraycopy(gapped, from, into, to, nbytes);
            }
        }
    }

    /** A region (row0, row1, col0, col1) by columns, without gaps. */
    void columns(long[] region, byte[] into) throws IOException {
        connect();
        int count = Math.toIntExact(region[1] - region[0]), stride = count * target.element.nbytes;
        receive(region, false, into, 0, stride);
        for (Connection node : connections) {
            for (RankBlock rank : node.blocks) {
                RankBlock.Part part = rank.part(region[0], 0, count);
                for (long col = region[2]; col < region[3]; col++) {
                    part.get(col, into, (int) (col - region[2]) * stride);
                }
            }
        }
    }

    private void connect() throws IOException {
        if (connections == null) {
            connections = Connection.all(target, chosen, false);
            far = connections.stream().anyMatch(node -> !node.near);
        }
    }

    /** The share of other nodes of a region. */
    private void receive(long[] region, boolean byRow, byte[] into, int first, int stride)
            throws IOException {
        for (Connection from : connections) {
            if (from.near) {
                continue;
            }
            Share share = new Share(from.node, region, target.element.nbytes, byRow);
            if (share.nbytes() > 0) {
                from.get(target.request(from.node, region, byRow), share.nbytes());
                share.receive(from, into, first, stride);
            }
        }
    }

    @Override
    public void close() throws IOException {
        if (connections != null) {
            Connection.closeAll(connections);
        }
    }
}
