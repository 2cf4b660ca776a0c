package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/**
 * Reads rows and regions of a matrix; connects at the first one.
 *
 * <p>On the ranks' own node it reads the ranks' memory; other nodes stream their share.
 */
final class Fetcher implements Closeable {
    static final int BATCH_BYTES = 1 << 20; // of elements, fetched at once

    final Target target;
    private final List<Connection> connections = new ArrayList<>();
    private final List<List<RankBlock>> near = new ArrayList<>(); // of each node; null: another node

    Fetcher(Target target) {
        this.target = target;
    }

    /** Rows [start, start + count): each begins {@code stride} bytes after the one before. */
    void rows(long start, int count, byte[] into, int first, int stride) throws IOException {
        connect();
        for (int k = 0; k < connections.size(); k++) {
            if (near.get(k) == null) {
                receive(k, new long[] {start, start + count, 0, target.cols}, true, into, first, stride);
                continue;
            }
            for (RankBlock rank : near.get(k)) {
                rank.getRows(start, count, into, first, stride);
            }
        }
    }

    /** A region (row0, row1, col0, col1) by columns, without gaps. */
    void columns(long[] region, byte[] into) throws IOException {
        connect();
        int count = Math.toIntExact(region[1] - region[0]), stride = count * target.element.nbytes;
        for (int k = 0; k < connections.size(); k++) {
            if (near.get(k) == null) {
                receive(k, region, false, into, 0, stride);
                continue;
            }
            for (RankBlock rank : near.get(k)) {
                for (long col = region[2]; col < region[3]; col++) {
                    int first = (int) (col - region[2]) * stride;
                    rank.getColumn(region[0], count, col, into, first);
                }
            }
        }
    }

    private void connect() throws IOException {
        while (near.size() < target.nodes.size()) {
            Target.Node node = target.nodes.get(near.size());
            Connection connection = Connection.open(node, target);
            connections.add(connection);
            near.add(connection.map(target, node, false));
        }
    }

    private void receive(
            int k, long[] region, boolean byRow, byte[] into, int first, int stride)
            throws IOException {
        Target.Node node = target.nodes.get(k);
        Share share = new Share(node, region, target.element.nbytes, byRow);
        if (share.nbytes() > 0) {
            connections.get(k).get(target.request(node, region, byRow), share.nbytes());
            share.receive(connections.get(k), into, first, stride);
        }
    }

    @Override
    public void close() throws IOException {
        for (List<RankBlock> ranks : near) {
            if (ranks != null) {
                ranks.forEach(RankBlock::close);
            }
        }
        for (Connection connection : connections) {
            connection.close(); // it ends the use of the ranks' memory
        }
    }
}
